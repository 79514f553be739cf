"""Keys and values of prefix blocks that are worth keeping. May import serving/requests, serving/batching."""
