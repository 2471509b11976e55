"""The core on a virtual clock: no threads, no torch, no sleeping."""
