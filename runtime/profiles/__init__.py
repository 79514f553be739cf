"""Hardware profiles: presets, files, and the profiles that `moepass calibrate` stored for this machine.

Start reading at `hardware_profiles.load_hardware`. The records are in `passes/machine/hardware.py`.

May import system.
"""
