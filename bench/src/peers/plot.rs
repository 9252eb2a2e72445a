//! Plots as SVG, on a background of their own, so that they can be read on light and dark pages.

use std::fmt::Write as _;
use std::ops::RangeInclusive;

use serde_json::Value;

/// One color for each library, distinct also for most color-blind readers; redlatch is black.
const COLORS: [&str; 9] = [
    "#000000", "#d55e00", "#e69f00", "#8c5a2b", "#0072b2", "#56b4e9", "#332288", "#009e73",
    "#cc79a7",
];

const WIDTH: f64 = 800.0;
/// Where the axes are; the rest of the picture is for labels and the legend.
const LEFT: f64 = 170.0;
const RIGHT: f64 = 580.0;
const TOP: f64 = 70.0;

/// Positions in the picture.
type Point = [f64; 2];

/// An axis with a logarithmic scale.
struct Axis {
    values: RangeInclusive<f64>,
    from: f64,
    to: f64,
}

impl Axis {
    /// Creates an axis from the tick below all values to the one above.
    fn around(rows: &[Value], figures: impl Fn(&Value) -> Vec<f64>, from: f64, to: f64) -> Axis {
        let values: Vec<f64> = rows.iter().flat_map(figures).collect();
        let low = values.iter().copied().fold(f64::MAX, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        let start = ticks().take_while(|tick| *tick <= low).last();
        let end = ticks().find(|tick| *tick >= high);
        let values = start.unwrap_or(1.0)..=end.unwrap_or(high);
        Axis { values, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let (start, end) = (self.values.start(), self.values.end());
        let share = (value.max(*start) / start).ln() / (end / start).ln();
        self.from + share * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        ticks().filter(|tick| self.values.contains(tick)).collect()
    }
}

/// Returns 1, 2, 5, 10, 20, 50, ….
fn ticks() -> impl Iterator<Item = f64> {
    (0..8).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)))
}

/// Throughput on free names over the number of tasks.
pub(crate) fn free(rows: &[Value]) -> String {
    let bottom = TOP + 330.0;
    let names = ["free_1", "free_16", "free_128"];
    let figures = |row: &Value| names.map(|name| number(&row[name]["pairs_per_s"])).to_vec();
    let y = Axis::around(rows, figures, bottom, TOP);
    let (values, from, to) = (1.0..=128.0, LEFT + 20.0, RIGHT - 20.0);
    let x = Axis { values, from, to };
    let tasks = [1.0, 16.0, 128.0];
    let mut svg = begin("Lock and unlock on free names", bottom);
    for tick in y.ticks() {
        let at = y.at(tick);
        line(&mut svg, [LEFT, at], [RIGHT, at], "#ddd", 1.0);
        text(&mut svg, [LEFT - 8.0, at + 4.0], "end", &short(tick));
    }
    text(&mut svg, [LEFT - 8.0, TOP - 18.0], "end", "pairs/s");
    let label = "tasks, each with a name of its own";
    x_axis(&mut svg, &x, &tasks, bottom, label);
    // The legend is in the order in which the lines end.
    let mut order: Vec<_> = rows.iter().zip(COLORS).collect();
    order.sort_by(|(one, _), (other, _)| figures(other)[2].total_cmp(&figures(one)[2]));
    for (place, (row, color)) in order.into_iter().enumerate() {
        let width = if row["name"] == "redlatch" { 4.0 } else { 2.0 };
        let figures = tasks.into_iter().zip(figures(row));
        let points: Vec<Point> = figures.map(|(n, rate)| [x.at(n), y.at(rate)]).collect();
        for ends in points.windows(2) {
            line(&mut svg, ends[0], ends[1], color, width);
        }
        for point in points {
            dot(&mut svg, point, color, color);
        }
        let [left, y] = legend(place);
        line(&mut svg, [left, y], [left + 20.0, y], color, width);
        text(&mut svg, [left + 28.0, y + 4.0], "start", name(row));
    }
    svg + "</svg>\n"
}

/// Throughput on one name, in one process and in four.
pub(crate) fn one_name(rows: &[Value]) -> String {
    let names = ["one_name_4x4", "one_name_1x16"];
    let figures = |row: &Value| names.map(|name| number(&row[name]["pairs_per_s"]));
    let labels = ["4 processes of 4 tasks", "16 tasks in one process"];
    let title = "Lock and unlock on one name";
    ranges(title, "pairs/s", labels, rows, figures)
}

/// Wake-up times.
pub(crate) fn wake(rows: &[Value]) -> String {
    let figures = |row: &Value| ["wake_p50_us", "wake_p99_us"].map(|name| number(&row[name]));
    let title = "From the release in one process to the acquisition in another";
    ranges(title, "µs", ["median", "99th percentile"], rows, figures)
}

/// Draws a row with two points for each library.
fn ranges(
    title: &str,
    unit: &str,
    labels: [&str; 2],
    rows: &[Value],
    figures: impl Fn(&Value) -> [f64; 2],
) -> String {
    let bottom = TOP + 30.0 * rows.len() as f64;
    let x = Axis::around(rows, |row| figures(row).to_vec(), LEFT, RIGHT);
    let mut svg = begin(title, bottom);
    x_axis(&mut svg, &x, &x.ticks(), bottom, unit);
    for (place, (row, color)) in rows.iter().zip(COLORS).enumerate() {
        let y = TOP + 15.0 + 30.0 * place as f64;
        let [one, other] = figures(row).map(|value| [x.at(value), y]);
        text(&mut svg, [LEFT - 12.0, y + 4.0], "end", name(row));
        line(&mut svg, one, other, color, 3.0);
        dot(&mut svg, one, color, color);
        dot(&mut svg, other, color, "#fff");
    }
    for (place, (label, fill)) in labels.into_iter().zip(["#000", "#fff"]).enumerate() {
        let [left, y] = legend(place);
        dot(&mut svg, [left, y], "#000", fill);
        text(&mut svg, [left + 12.0, y + 4.0], "start", label);
    }
    svg + "</svg>\n"
}

/// Returns a figure of the results.
pub(crate) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

fn name(row: &Value) -> &str {
    row["name"].as_str().unwrap_or_default()
}

/// Writes a tick as `500`, `2k` or `1M`.
fn short(tick: f64) -> String {
    match tick {
        1e6.. => format!("{}M", tick / 1e6),
        1e3.. => format!("{}k", tick / 1e3),
        _ => tick.to_string(),
    }
}

/// Returns the position of an entry of the legend.
fn legend(place: usize) -> Point {
    [RIGHT + 18.0, TOP + 14.0 + 24.0 * place as f64]
}

fn begin(title: &str, bottom: f64) -> String {
    let height = bottom + 60.0;
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' \
         font-family='sans-serif' font-size='13'>\n\
         <rect width='{WIDTH}' height='{height}' rx='8' fill='#fff'/>\n"
    );
    text(&mut svg, [WIDTH / 2.0, 28.0], "middle", title);
    svg
}

fn x_axis(svg: &mut String, axis: &Axis, ticks: &[f64], bottom: f64, label: &str) {
    for tick in ticks {
        let x = axis.at(*tick);
        line(svg, [x, TOP], [x, bottom], "#ddd", 1.0);
        text(svg, [x, bottom + 20.0], "middle", &short(*tick));
    }
    let middle = (LEFT + RIGHT) / 2.0;
    text(svg, [middle, bottom + 42.0], "middle", label);
}

fn line(svg: &mut String, [x1, y1]: Point, [x2, y2]: Point, color: &str, width: f64) {
    let _ = writeln!(
        svg,
        "<line x1='{x1:.1}' y1='{y1:.1}' x2='{x2:.1}' y2='{y2:.1}' stroke='{color}' stroke-width='{width}'/>"
    );
}

fn dot(svg: &mut String, [x, y]: Point, color: &str, fill: &str) {
    let _ = writeln!(
        svg,
        "<circle cx='{x:.1}' cy='{y:.1}' r='5' fill='{fill}' stroke='{color}' stroke-width='2'/>"
    );
}

fn text(svg: &mut String, [x, y]: Point, anchor: &str, words: &str) {
    let _ = writeln!(
        svg,
        "<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}' fill='#222'>{words}</text>"
    );
}
