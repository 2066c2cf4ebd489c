class Tracking:
    def log(self, data, step, backend=None):
        print(step, {name: round(value, 6) for name, value in data.items() if not name.startswith("timing")})
