"""Sources of hardware profiles: presets, files, and what `moepass calibrate` has stored. May import system."""
