"""What does each of the five changes bring alone, what do all bring together, and do they help or hinder each other?"""
