"""What people and machines read: progress, JSON."""
