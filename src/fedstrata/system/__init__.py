"""What does this machine have, how does a process end on it, and where does its time go?"""
