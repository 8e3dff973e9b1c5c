//! Writes rectangles, lines and text as SVG.

use std::fmt::Write;

/// SVG document under construction.
#[derive(Debug, Default)]
pub(super) struct Svg {
    body: String,
}

/// Rectangle, in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    /// Left edge.
    pub(super) x: f64,
    /// Top edge.
    pub(super) y: f64,
    /// Width.
    pub(super) width: f64,
    /// Height.
    pub(super) height: f64,
}

/// Point, in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    /// Distance from the left edge.
    pub(super) x: f64,
    /// Distance from the top edge.
    pub(super) y: f64,
}

/// Returns the point (x, y).
pub(super) const fn at(x: f64, y: f64) -> Point {
    Point { x, y }
}

/// Horizontal alignment of a text to its point.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    /// The text starts at the point.
    Start,
    /// The text is centred at the point.
    Middle,
    /// The text ends at the point.
    End,
}

impl Svg {
    /// Adds a filled rectangle.
    pub(super) fn rect(&mut self, area: Area, fill: &str, opacity: f64) {
        let Area { x, y, width, height } = area;
        let opacity = if opacity < 1.0 {
            format!(" fill-opacity=\"{}\"", short(opacity))
        } else {
            String::new()
        };
        self.push(format_args!(
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{fill}\"{opacity}/>",
            short(x),
            short(y),
            short(width),
            short(height)
        ));
    }

    /// Adds the outline of a rectangle.
    pub(super) fn frame(&mut self, area: Area, stroke: &str) {
        let Area { x, y, width, height } = area;
        self.push(format_args!(
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" \
             stroke=\"{stroke}\"/>",
            short(x),
            short(y),
            short(width),
            short(height)
        ));
    }

    /// Adds a line.
    pub(super) fn line(&mut self, from: Point, to: Point, stroke: &str) {
        self.push(format_args!(
            "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{stroke}\"/>",
            short(from.x),
            short(from.y),
            short(to.x),
            short(to.y)
        ));
    }

    /// Adds a text of `size` pixels with its baseline at `at`.
    pub(super) fn text(&mut self, at: Point, size: f64, anchor: Anchor, fill: &str, text: &str) {
        self.text_with(at, size, anchor, fill, text, "");
    }

    /// Adds a bold text.
    pub(super) fn heading(&mut self, at: Point, size: f64, text: &str) {
        self.text_with(at, size, Anchor::Start, "#111", text, " font-weight=\"600\"");
    }

    /// Adds a centred text that is rotated to read upwards.
    pub(super) fn upward(&mut self, at: Point, size: f64, fill: &str, text: &str) {
        let turn = format!(" transform=\"rotate(-90 {} {})\"", short(at.x), short(at.y));
        self.text_with(at, size, Anchor::Middle, fill, text, &turn);
    }

    /// Returns the document.
    pub(super) fn finish(self, width: f64, height: f64, title: &str) -> String {
        let width = short(width);
        let height = short(height);
        let title = escape(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" shape-rendering=\"crispEdges\" \
             font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\">\n<title>{title}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
            self.body
        )
    }

    fn text_with(
        &mut self,
        at: Point,
        size: f64,
        anchor: Anchor,
        fill: &str,
        text: &str,
        more: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        self.push(format_args!(
            "<text x=\"{}\" y=\"{}\" font-size=\"{}\"{anchor} fill=\"{fill}\"{more}>{}</text>",
            short(at.x),
            short(at.y),
            short(size),
            escape(text)
        ));
    }

    fn push(&mut self, shape: std::fmt::Arguments<'_>) {
        // writing to a String cannot fail
        let written = self.body.write_fmt(shape).and_then(|()| self.body.write_char('\n'));
        debug_assert!(written.is_ok());
    }
}

/// Formats a number with at most two decimals and without trailing zeros.
fn short(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_text_is_escaped() {
        assert_eq!(
            [short(1.0), short(0.25), short(-0.1), short(100.0)],
            ["1", "0.25", "-0.1", "100"]
        );
        assert_eq!(escape("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
    }
}
