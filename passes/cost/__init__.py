"""FLOPs and bytes of every node, in the symbols of the graph's shapes. May import graph, ir."""
