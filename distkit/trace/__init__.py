"""Recording what ranks say to each other, and turning it into other forms."""
