"""What this machine has, how a process ends on it, and where its time goes."""
