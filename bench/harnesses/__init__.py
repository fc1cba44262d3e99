"""lm-eval, lighteval and TRL against a served model, graded by Headway inside and outside."""
