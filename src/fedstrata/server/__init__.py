"""What does the server do in a round? It asks clients, validates what they send, and makes one model of it."""
