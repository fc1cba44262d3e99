"""Versioned weights: manifests, weight group epochs, publisher, receiver."""
