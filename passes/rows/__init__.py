"""Where the rows of a tensor lie in what operations give, and which operations leave rows apart. May import graph, ir."""
