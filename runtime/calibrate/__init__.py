"""This machine is measured: products, attention, copies, collectives. May import every room; none imports it."""
