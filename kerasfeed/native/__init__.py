"""The engine in C++: the window, the wire and the memory, for the producer and the ranks; and its Python side."""
