"""Knowledge about models: families, checkpoints, the demo. Imports nothing else of moepass."""
