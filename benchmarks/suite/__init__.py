"""What `make bench` runs: kerasfeed and other ways of feeding ranks, measured side by side. See docs/benchmarks.md."""
