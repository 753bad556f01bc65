"""Pages of the documentation site for the files outside docs/ that pages link to, so that it stands alone."""

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

PROJECT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
EXTERNAL = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*stylesheet[^>]*//")
IMAGE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files, config):
    """Add a page for every file that a page links to, and for those that such pages link to."""
    root = Path(config.config_file_path).parent
    waiting = list(PROJECT_PAGES)
    for file in files.documentation_pages():
        waiting += _outside(file.content_string, f"docs/{file.src_uri}")
    made = set()
    while waiting:
        path = waiting.pop()
        if path in made or not (root / path).exists():
            continue
        made.add(path)
        text = _content(root / path, path)
        files.append(File.generated(config, _page_of(path), content=text))
        if path.endswith(".md"):
            waiting += _outside(text, path)
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    origin = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"

    def rewrite(match):
        target = _resolve(match[2], origin)
        goal = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        return (
            f"{match[1]}{posixpath.relpath(goal, posixpath.dirname(here) or '.')}{match[3] or ''}{match[4]}"
        )

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewrite, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewrite, markdown[end:])])


def on_page_content(html, page, config, files):
    """Let every picture open in full size."""
    return IMAGE.sub(r'<a href="\1">\g<0></a>', html)


def on_post_page(output, page, config):
    """Refuse a page that would ask another host for something."""
    if found := EXTERNAL.search(output):
        raise PluginError(
            f"{page.file.src_uri} loads {output[found.start() : found.end() + 60]!r} from elsewhere."
        )
    return output


def _outside(text, origin):
    targets = (_resolve(match[2], origin) for match in LINK.finditer(FENCE.sub("", text)))
    return [target for target in targets if not target.startswith("docs/")]


def _resolve(link, origin):
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _page_of(path):
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _content(file, path):
    if file.is_dir():
        return f"# {path}\n\n" + "\n".join(f"- `{entry.name}`" for entry in sorted(file.iterdir()))
    try:
        text = file.read_text()
    except UnicodeDecodeError:
        return f"# {path}\n\nA binary file of {file.stat().st_size:,} bytes.\n"
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"
