"""Other libraries meet moepass: expert parallelism of transformers. May import every room; none imports it."""
