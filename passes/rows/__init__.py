"""Position of rows in the results of operations, and which operations keep rows separate. May import graph, ops, ir."""
