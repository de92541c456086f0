"""Defines the generator and discriminator towers, and counts their parameters and FLOPs by arithmetic."""
