"""What the Python tests share: a daemon of their own, model files by hand, the wire, processes."""
