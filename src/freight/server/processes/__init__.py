"""The server's processes and the messages between them."""
