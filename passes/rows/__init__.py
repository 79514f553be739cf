"""Where rows lie in what operations give, and which operations leave rows apart. May import graph, ops, ir."""
