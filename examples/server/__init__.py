"""The parts of `serve.py`: an OpenAI-compatible server over one serving loop."""
