"""The producer of a feed: a child process of one rank that runs the user's pipeline and serves all ranks.

`supervisor` runs in the rank: it starts the child, restarts it, and ends it. Everything else runs in the child
(`python -m kerasfeed.producer`): `pipeline` yields elements, `pump` puts them into the `window`, `service` hands them
out.
"""
