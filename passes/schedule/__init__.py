"""Decisions become proved slot operations. May import planner, parallel, blocks, graph, ir."""
