// Package pages reads the commands in README.md and in the pages of packaging/doc, and lists which
// test types them, or why no test does.
package pages

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Block is a code block of a page.
type Block struct {
	Page, Section string
	// Language follows the fence; it is empty for an indented block.
	Language string
	Lines    []string
}

// Command is a command of a block, with the output that the page shows below it.
type Command struct{ Text, Output string }

// File is a file that the page tells the reader to write, or a unit's drop-in that `systemctl edit`
// is to make.
type File struct{ Name, Content string }

// Read returns the code blocks of a page, whose path is relative to the source tree at top.
func Read(top, page string) ([]Block, error) {
	text, err := os.ReadFile(filepath.Join(top, page))
	if err != nil {
		return nil, err
	}
	var all []Block
	section, blank := "", true
	lines := strings.Split(string(text), "\n")
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		indent := len(line) - len(strings.TrimLeft(line, " "))
		language, fenced := strings.CutPrefix(line[indent:], "```")
		switch {
		case strings.HasPrefix(line, "## ") || strings.HasPrefix(line, "### "):
			section = strings.TrimLeft(line, "# ")
		case fenced:
			b := Block{Page: filepath.Base(page), Section: section, Language: language}
			for i++; i < len(lines) && strings.TrimSpace(lines[i]) != "```"; i++ {
				b.Lines = append(b.Lines, unindent(lines[i], indent))
			}
			all = append(all, b)
		case blank && indent >= 4 && line != "":
			b := Block{Page: filepath.Base(page), Section: section}
			for ; i < len(lines) && (lines[i] == "" || strings.HasPrefix(lines[i], line[:indent])); i++ {
				b.Lines = append(b.Lines, unindent(lines[i], indent))
			}
			for i--; b.Lines[len(b.Lines)-1] == ""; i-- {
				b.Lines = b.Lines[:len(b.Lines)-1]
			}
			all = append(all, b)
		}
		blank = i < len(lines) && strings.TrimSpace(lines[i]) == ""
	}
	return all, nil
}

func unindent(line string, indent int) string { return line[min(indent, len(line)):] }

// file is the first line of a file that the reader writes.
var file = regexp.MustCompile(`^# ((?:systemctl edit )?[\w./@-]+\.[a-z]+)$`)

// prompt is the prompt of a shell.
var prompt = regexp.MustCompile(`^[#$] `)

// Files returns the files that the block has: each begins with a comment that is its name.
func (b Block) Files() (all []File) {
	for _, line := range b.Lines {
		if name := file.FindStringSubmatch(line); name != nil {
			all = append(all, File{Name: name[1]})
		} else if len(all) > 0 {
			all[len(all)-1].Content += line + "\n"
		} else {
			return nil
		}
	}
	return all
}

// Commands returns the commands of the block. If the first line has a prompt, those with a prompt
// are commands, and the others output. If it has none, each line is a command, except for the lines
// that continue it.
func (b Block) Commands() (all []Command) {
	if b.Language != "" && b.Language != "sh" && b.Language != "console" || b.Files() != nil {
		return nil
	}
	prompts := prompt.MatchString(b.Lines[0])
	continued, end := false, ""
	for _, line := range b.Lines {
		switch {
		case prompts && prompt.MatchString(line):
			all = append(all, Command{Text: line[2:]})
		case prompts:
			all[len(all)-1].Output += line + "\n"
		case continued:
			all[len(all)-1].Text += "\n" + line
		case line != "":
			all = append(all, Command{Text: line})
		}
		switch {
		case strings.HasPrefix(line, "for "):
			end = "done"
		case strings.HasPrefix(line, "#!"):
			end = "the end of the block"
		case line == end:
			end = ""
		}
		continued = end != "" || strings.HasSuffix(line, `\`)
	}
	return all
}
