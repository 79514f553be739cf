"""Where hardware profiles come from: presets and files. Imports no other room of the face."""
