"""One client's visit: from an assignment to an update. Here is the local step."""
