"""Small trainings at random layouts, judged by one process in float64."""
