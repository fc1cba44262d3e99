"""How an answer written in LaTeX or plain notation is read and compared with another."""
