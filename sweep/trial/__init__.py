"""The interface on disk: sweep and trial folders, states, metrics, locks and leases."""
