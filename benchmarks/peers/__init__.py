"""Other engines' own schedulers, driven on the requests of our benchmarks."""
