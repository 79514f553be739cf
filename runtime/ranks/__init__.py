"""Ranks meet, agree, and notice that one is lost. May import system."""
