"""Predicates ``ci:``: what slime, Miles and Relax assert in their CI."""
