"""BandMF: correlated noise with amplification by sampling, accounted nearly exactly (THEORY section 7)."""
