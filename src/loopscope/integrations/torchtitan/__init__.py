"""loopscope inside torchtitan's trainer. Import from the modules: text.py needs no torch, the rest does."""
