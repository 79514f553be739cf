"""What is read from and written into FX graphs: nodes, sizes, collectives, texts, lines of source. May import ir."""
