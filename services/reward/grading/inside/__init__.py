"""What runs inside the sandbox around the program under test. Standard library only."""
