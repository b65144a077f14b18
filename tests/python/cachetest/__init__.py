"""What the Python tests share: a daemon of their own, hand-made model files, the wire, processes."""
