"""Who is let in, who we are to others, and what a job may make us open."""
