"""How steps reach a rank: one connection to the producer, which survives the producer's restarts."""
