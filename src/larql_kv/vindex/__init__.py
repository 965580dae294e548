"""A model as a vector index: gate, up and down vectors by layer and feature."""
