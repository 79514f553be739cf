"""Where hardware profiles come from: presets, files, and what `moepass calibrate` has stored. May import system."""
