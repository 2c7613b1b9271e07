"""Copy engines behind one interface."""
