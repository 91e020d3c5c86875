"""Test common system errors in the languages of people's shells: strerror's texts in ten locales."""

from __future__ import annotations

import pytest

from diagnosis.offline import diagnose_text

FULL, DENIED, IO, MEMORY, MISSING = (
    "storage.full",
    "storage.permission",
    "storage.io",
    "memory.host_oom",
    "data.missing",
)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("cp: 写入 '/data/epoch_12.pdparams' 时出错: 设备上没有空间", FULL),
        ("cp: Fehler beim Schreiben von '/out/m.pt': Auf dem Gerät ist kein Speicherplatz mehr verfügbar", FULL),
        ("cp: Fehler beim Schreiben von '/out/m.pt': Kein Speicherplatz mehr auf dem Gerät verfügbar", FULL),
        ("tar: poids.bin : écriture impossible : Aucun espace disponible sur le périphérique", FULL),
        ("OSError: [Errno 28] 장치에 남은 공간이 없음: '/out/model.bin'", FULL),
        ("dd: errore scrivendo 'modello': Spazio esaurito sul device", FULL),
        ("cp: błąd zapisu do '/out/m.pt': Przekroczony limit dyskowy", FULL),
        ("mkdir: ディレクトリ '/gpfs/out' を作成できません: 許可がありません", DENIED),
        ("bash: /scratch/run.sh: Отказано в доступе", DENIED),
        ("mkdir: no se puede crear el directorio «/datos/salida»: Permiso denegado", DENIED),
        ("cat: /gpfs/dados/parte-3.bin: Erro de entrada/saída", IO),
        ("cat: /data/shard-3.bin：输入/输出错误", IO),
        ("./prep.sh: fork: Ne peut allouer de la mémoire", MEMORY),
        ("bash: fork: 메모리를 할당할 수 없습니다", MEMORY),
        ("cp: nie można wykonać stat na '/dane/korpus.bin': Nie ma takiego pliku ani katalogu", MISSING),
        ("cp: 無法 stat '/data/corpus.bin': 沒有此一檔案或目錄", MISSING),
        ("./start.sh: Zeile 12: ./prep.sh: Datei oder Verzeichnis nicht gefunden", "program.config"),
        ("bash: ./prep.sh: そのようなファイルやディレクトリはありません", "program.config"),
        ("/bin/bash: ./prep.sh: 没有那个文件或目录", "program.config"),
        ("bash: ./prep.sh : Aucun fichier ou dossier de ce type", "program.config"),
    ],
)
def test_a_system_error_in_another_language_is_understood(line: str, cause: str) -> None:
    verdict = diagnose_text(f"step 100 loss 2.31\n{line}\nsrun: error: n1: task 0: Exited with exit code 1\n")
    assert verdict.cause == cause, (verdict.cause, verdict.evidence)


@pytest.mark.parametrize(
    "line",
    [
        "检查设备上的空间: 还有 412 GB",
        "Keine Berechtigung nötig, der Ordner ist öffentlich",
        "Permiso denegado: 0 casos en el conjunto de datos de etiquetas",
    ],
)
def test_everyday_words_of_another_language_are_no_error(line: str) -> None:
    log = "".join(f"step {step} loss {3 - step / 10}\n" for step in range(1, 9))
    assert diagnose_text(f"{line}\n{log}training finished\n").cause == "none"
