"""Decisions become proved slot operations. May import planner, parallel, parallel/match, blocks, graph, ir."""
