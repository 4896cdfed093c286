"""Other engines' own schedulers and allocators, driven on the requests of our benchmarks."""
