"""What runs beside a user's function, in its process."""
