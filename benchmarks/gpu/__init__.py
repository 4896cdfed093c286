"""What a CUDA machine is asked to prove; `run.sh` runs it."""
