"""Models that make something: pictures, videos, hands, and codes from which a signal is made again."""
