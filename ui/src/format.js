// Numbers for people.
export const bytes = (n) => {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  return `${Math.round(n ?? 0)} B`;
};
export const count = (n) => Math.round(n ?? 0).toLocaleString("en");
export const rate = (n) => (n > 0 && n < 10 ? n.toFixed(1) : count(n));
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");
export const seconds = (s) => {
  if (s == null || Number.isNaN(s)) return "–";
  if (s < 1e-3) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 120) return `${s.toFixed(1)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
};
// The upper bound of the bucket where a share of a histogram's values lie.
export const quantile = (histogram, share) => {
  const total = histogram.counts.reduce((sum, n) => sum + n, 0);
  if (!total) return null;
  let seen = 0;
  for (let i = 0; i < histogram.bounds.length; i++) {
    seen += histogram.counts[i];
    if (seen >= share * total) return histogram.bounds[i];
  }
  return histogram.bounds.at(-1);
};
export const total = (object) => Object.values(object ?? {}).reduce((sum, n) => sum + n, 0);
